"""Study: does a burst of rare tokens do more damage with a slowly adapting second moment?"""
