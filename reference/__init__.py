"""The vLLM connector. What it needs of vLLM and NIXL is imported where it is used: the logic runs without them."""
