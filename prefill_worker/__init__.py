"""The prefill phase: prompts into pages and a first token, then the hand-off."""
