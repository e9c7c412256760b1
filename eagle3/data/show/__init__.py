"""Samples as a person sees them: each token, and which are supervised; in a terminal or as a page."""
