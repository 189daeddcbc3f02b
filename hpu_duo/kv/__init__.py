"""The KV stores: leases of blocks and rows, copies between them, and their memory."""
