"""The programs that run in a sandbox's own processes; standard library only.

They are started by path in a Python that need not have `rollout` installed, under the name
``rollout_sandbox``: `supervisor` stands outside the isolation and watches, `program_host` is the
first process inside and runs what it is sent, in processes of their own.
"""
