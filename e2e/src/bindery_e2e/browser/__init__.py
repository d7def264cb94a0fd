"""A real browser that opens hostile web pages, and the site that serves them."""
