"""Spark jobs over topics: export and count."""
