"""The vLLM KV connector. Importing this package imports no vLLM; its modules may."""
