"""Moves KV pages between two layouts; knows no model."""
