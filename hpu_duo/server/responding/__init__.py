"""From a plan, or an error, to a response."""

from hpu_duo.server.responding.errors import as_api_error, error_response
from hpu_duo.server.responding.planned import PlannedResponse
from hpu_duo.server.responding.presence import CallerGoneError, while_there

__all__ = ["CallerGoneError", "PlannedResponse", "as_api_error", "error_response", "while_there"]
