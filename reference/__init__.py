"""The vLLM connector: what it needs of vLLM and of NIXL is imported where it is used, so that the logic runs without."""
