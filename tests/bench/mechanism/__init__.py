"""Study: does a burst of rare tokens do more damage if Adam's second moment adapts slowly?"""
