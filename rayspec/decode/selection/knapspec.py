class KnapSpec:
    def __init__(self,*a): pass
