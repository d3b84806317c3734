"""Model, weights, attention, paged cache, sampling, and the step loop that drives mounted phases. Knows no transport."""
