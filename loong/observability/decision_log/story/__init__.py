"""The history of one request from a decision log.

Lines of the log are indexed by request (`index`) and ordered as steps of one request (`trail`). Equal steps
are joined (`fold`), combined with measured times (`story`), and put into words (`words`).
"""
