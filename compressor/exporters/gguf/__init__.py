"""The exporter ``gguf``: one file with weights, configuration and tokenizer, for llama.cpp."""
