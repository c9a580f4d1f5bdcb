"""The router: one OpenAI-compatible address for several prefill and decode servers. Needs ``pushkv[router]``."""
