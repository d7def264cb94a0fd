"""Spark jobs over a cluster: data sources that read every replica, and the audit that compares the replicas."""
