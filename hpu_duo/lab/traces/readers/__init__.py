"""Formats in which traces of served requests are published, one file each.

Every reader takes a path and yields, for each row of the file in its order, an ``Arrival`` or None for a row
that is no served request. Times are as in the file, and may begin anywhere above 0.
"""
