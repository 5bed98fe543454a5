"""Networks of ``transformers``."""
