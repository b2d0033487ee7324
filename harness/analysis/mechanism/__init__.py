"""An experiment: does a burst of rare tokens hurt more with a slow second moment?"""
