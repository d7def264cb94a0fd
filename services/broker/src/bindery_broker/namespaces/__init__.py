"""Tenants, namespaces and their policies, and which policies are in force for a topic."""
