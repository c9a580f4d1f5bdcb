"""End-to-end tests: real vLLM servers on the CPU, real bytes, real kills. ``make e2e`` runs them."""
