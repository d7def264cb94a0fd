"""The state of the cluster on which decisions are based: the bookies, and the ledgers that each one stores."""
