"""Cursors: what each subscription of a topic has acknowledged, and where that is stored."""
