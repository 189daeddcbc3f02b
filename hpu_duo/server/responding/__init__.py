"""From a plan, or an error, to a response."""

from hpu_duo.server.responding.errors import as_api_error, error_response
from hpu_duo.server.responding.planned import PlannedResponse

__all__ = ["PlannedResponse", "as_api_error", "error_response"]
