"""Charge requests to clients, tenants and namespaces with limits, once in a cluster of several brokers."""
