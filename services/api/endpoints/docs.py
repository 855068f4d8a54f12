"""GET /docs: a page that shows /openapi.json and sends requests, with nothing from elsewhere.

The page knows nothing by itself, so it needs no key; what it reads and sends carries the key that is typed into it.
"""

import base64
import hashlib

from starlette.requests import Request
from starlette.responses import Response

from services.api.gateway import Gateway
from services.api.route import Endpoint

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
html { color-scheme: light dark }
summary { cursor: pointer; padding: .3rem 0 } code, pre, textarea { font: 13px/1.4 ui-monospace, monospace }
b.m { display: inline-block; width: 4.5rem } details details { margin-left: 1rem }
textarea { width: 100%; height: 8rem }
pre { overflow: auto; max-height: 24rem; padding: .5rem; border: 1px solid #8886 } input { width: 22rem }
"""
SCRIPT = """
const make = (tag, text, parent) => {
  const node = document.createElement(tag); if (text) node.textContent = text; parent?.append(node); return node;
};
const key = document.getElementById("key"), list = document.getElementById("list");
const headers = () => key.value ? {authorization: "Bearer " + key.value} : {};
let spec;
const resolve = (schema, depth) => {
  if (!schema || typeof schema !== "object" || depth > 6) return schema;
  if (Array.isArray(schema)) return schema.map((each) => resolve(each, depth));
  if (schema.$ref) return resolve(spec.components.schemas[schema.$ref.split("/").pop()], depth + 1);
  return Object.fromEntries(Object.entries(schema).map(([name, value]) => [name, resolve(value, depth)]));
};
const shown = (parent, title, schema) => {
  const box = make("details", "", parent); make("summary", title, box);
  box.ontoggle = () => { if (box.children.length < 2) make("pre", JSON.stringify(resolve(schema, 0), null, 2), box); };
};
const operation = (path, method, about) => {
  const box = make("details", "", list), head = make("summary", "", box);
  make("b", method.toUpperCase(), head).className = "m";
  make("code", path, head); make("span", "  " + about.summary, head);
  const fields = (about.parameters ?? []).map((each) => {
    const row = make("p", each.name + " (" + each.in + ") ", box);
    return [each, make("input", "", row)];
  });
  const content = about.requestBody?.content?.["application/json"];
  if (content) shown(box, "Body", content.schema);
  const answer = Object.values(about.responses["200"]?.content ?? {})[0];
  if (answer) shown(box, "Answer", answer.schema);
  const body = content && make("textarea", "{}", box), send = make("button", "Send", box), out = make("pre", "", box);
  send.onclick = async () => {
    out.textContent = "";
    let url = path; const extra = headers();
    for (const [each, input] of fields) {
      if (each.in === "path") url = url.replace("{" + each.name + "}", encodeURIComponent(input.value));
      else if (each.in === "header" && input.value) extra[each.name] = input.value;
      else if (input.value) url += (url.includes("?") ? "&" : "?") + each.name + "=" + encodeURIComponent(input.value);
    }
    if (content) extra["content-type"] = "application/json";
    try {
      const reply = await fetch(url, {method: method.toUpperCase(), headers: extra, body: body?.value});
      out.textContent = reply.status + "\\n";
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part; !(part = await reader.read()).done;) out.textContent += part.value;
    } catch (error) { out.textContent += error; }
  };
};
const load = async () => {
  list.textContent = "";
  const reply = await fetch("/openapi.json", {headers: headers()});
  if (!reply.ok) { list.textContent = "Type an API key above: " + reply.status; return; }
  spec = await reply.json();
  for (const [path, methods] of Object.entries(spec.paths))
    for (const [method, about] of Object.entries(methods)) operation(path, method, about);
};
key.onchange = load; load();
"""
PAGE = f"""<!doctype html><html lang="en">
<head><meta charset="utf-8"><title>Valence API</title><style>{STYLE}</style></head>
<body><h1>Valence API</h1><p><a href="/openapi.json">/openapi.json</a></p>
<p>API key <input id="key" type="password" autocomplete="off"></p><div id="list"></div>
<script>{SCRIPT}</script></body></html>
"""


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = f"default-src 'none'; connect-src 'self'; style-src {source(STYLE)}; script-src {source(SCRIPT)}"


async def docs(gateway: Gateway, request: Request) -> Response:
    return Response(PAGE, headers={"content-security-policy": POLICY}, media_type="text/html")


ENDPOINTS = [Endpoint("GET", "/docs", docs, "This page in a browser", public=True, media_type="text/html")]
