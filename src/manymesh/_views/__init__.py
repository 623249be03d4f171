"""Views: what was measured or predicted, as text, as a picture, as a page."""
