"""What touches the machine: errors, the console, processes, files, git.

Nothing else starts a process or runs git.
"""
