"""Commands that make the documentation: the site, its generated pages, and its figures."""
