"""kvsim: a fast, step-exact simulator of LLM serving engines."""
