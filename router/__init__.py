"""HTTP API, admission, placement, and one request's life across the pair. No torch, no weights, no Ray."""
