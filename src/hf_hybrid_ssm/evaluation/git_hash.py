"""What lm-eval asks git for, where there is no repository."""

from pathlib import Path


def ask_git_only_within_a_repository() -> None:
    """lm-eval notes the commit of the current folder in its results, by a process whose complaint reaches the user
    ("fatal: not a git repository"). Outside of a repository it is not asked.
    """
    from lm_eval import evaluator

    here = Path.cwd()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        evaluator.get_git_commit_hash = lambda: None
