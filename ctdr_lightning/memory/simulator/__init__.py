"""Trace and actions to a timeline: the referee between policies."""
