"""Names of the panels of the help."""

HEADS = "Heads"
ENGINE = "Engine"
LIMITS = "Limits"
