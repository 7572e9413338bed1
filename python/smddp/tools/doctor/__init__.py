"""`smddp doctor`: checks a machine, or all hosts of a job, and reports each problem with its effect and remedy.

  facts       values observed by one rank, as JSON
  checks/     conversion of facts to findings, one family per file, without further observation
  rendezvous  exchange of facts with rank 0, independent of a group of the ranks
  launch      rank of this process, and processes that the doctor starts
  measure     latency and bandwidth between pairs; `heatmap` draws them
  session     the sequence of all steps, each with a deadline
  report      text output

It needs no torch.
"""

__all__: list[str] = []
