"""Where keys and values live: block and row leases, the copies between them, and the bytes they take."""
