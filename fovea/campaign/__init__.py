"""Many runs of the entry points under one command: what is finished is kept, what has changed is done again."""
