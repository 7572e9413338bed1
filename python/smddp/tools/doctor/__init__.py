"""`smddp doctor`: looks at a machine, or at all hosts of a job, and says what is wrong, what that means and what to do.

  facts      what a rank sees, as plain values that travel as JSON
  checks/    facts -> findings, a family in each file; none of them looks at anything itself
  meeting    how the ranks tell rank 0 their facts: before, and whether or not, a group of them can be made
  launch     which rank this process is, or the processes that it starts for itself
  measure    latency and bandwidth between pairs, and the heat map of them in `heat`
  visit      all of it in order, each step with a deadline
  report     the text

It needs no torch.
"""
