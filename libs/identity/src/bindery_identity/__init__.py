"""Who a client is: the credentials of all ports and protocols, and the principals that they prove."""
