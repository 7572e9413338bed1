"""docs/reference/estimator-rules.md: strategies, keys and rules of an estimator's `distribution=`."""

from __future__ import annotations

import writer

SOURCE = "python/smddp/estimator/rules.py"


def page() -> str:
    from smddp.estimator import rules

    strategies = []
    for name, keys in rules.STRATEGIES.items():
        if name == "smdistributed":
            strategies += [
                (f"`smdistributed`, `{library}`", ", ".join(f"`{key}`" for key in keys_of))
                for library, keys_of in rules.LIBRARIES.items()
            ]
        else:
            strategies.append((f"`{name}`", ", ".join(f"`{key}`" for key in keys)))
    parts = [
        writer.paragraph(
            "An estimator checks its `distribution=` by every rule below, in this order, before it starts a rank. The "
            "first broken rule raises ValueError with the rule, the value and the remedy."
        ),
        "```python\nfrom smddp.estimator import validate\n\n"
        'validate({"torch_distributed": {"enable": True}})\n'
        "# ValueError: distribution: every key is known; 'enable' in 'torch_distributed' is none ...\n```\n\n",
        "## Strategies and their keys\n\n",
        writer.table(("strategy", "keys"), strategies),
        "## Rules\n\n",
        writer.table(("rule", "text"), [(f'<a id="{rule.name}"></a>`{rule.name}`', rule.text) for rule in rules.RULES]),
        writer.paragraph(
            "A job for an instance type without EFA that sets variables of EFA logs a warning. Versions of frameworks "
            "are not among the rules."
        ),
        writer.links(
            ("Launch jobs from Python", "../guides/estimator.md"),
            ("From the SageMaker Python SDK", "../migrate/sagemaker-sdk.md"),
        ),
    ]
    return writer.page("Rules of distribution= in estimators", SOURCE, *parts)
