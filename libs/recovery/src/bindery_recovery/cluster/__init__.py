"""The state of the cluster that decisions are made from: bookies, and which ledgers each one stores."""
