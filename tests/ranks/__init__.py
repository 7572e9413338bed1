"""Rank processes of the tests.

`process` starts one process, `serving` runs cases in it, `pool` sends cases to several ranks and collects the answers.
`cases` finds and marks cases, `group` creates the default group, `forked` runs code, and `launching` starts scripts
with the environment of a launcher.
"""
