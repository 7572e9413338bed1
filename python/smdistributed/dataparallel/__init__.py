"""The module names under which scripts know this library. All of it is smddp and torch."""
