"""What a decision log tells of one request.

Lines of the log are indexed by request (`index`), put in order as steps of one request (`trail`), equal ones
joined (`fold`), and told with what was measured (`story`), in words (`words`).
"""
