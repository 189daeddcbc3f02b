"""One address for several servers of the same model: processes that are started, routed to and watched."""
