CLAIMS_FILE = "pipeline/studies/orthogonal/claims.yaml"
