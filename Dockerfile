# granite on an edge host. Build: docker build -t granite .   Run: see compose.yaml and nbs/82_gpu_host.ipynb
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends git libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 granite
WORKDIR /granite
COPY --chown=granite:granite . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable . && mkdir -p runs figures && chown granite:granite runs figures
USER granite
ENV PYTHONUNBUFFERED=1 GRANITE_CACHE=/granite/cache
ENTRYPOINT ["granite"]
CMD ["--help"]
