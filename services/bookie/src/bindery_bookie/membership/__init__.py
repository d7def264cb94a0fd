"""Who this bookie is: cookie, addresses, directory lock, registration."""
