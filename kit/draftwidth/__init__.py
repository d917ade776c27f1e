"""Switch the draft width of a running SGLang server.

:mod:`~kit.draftwidth.plugin` runs inside the server and adds the setting, :mod:`~kit.draftwidth.client` sets it over
HTTP and reads it back, :mod:`~kit.draftwidth.policy` chooses a width by load. Draft width is the number of draft
tokens a step; 0 = drafting off.
"""
