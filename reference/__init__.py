"""The vLLM connector comes here."""
