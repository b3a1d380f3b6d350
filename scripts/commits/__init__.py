"""The patch set as git history: patches, branches, bundles, and a worktree to edit a fix in."""
