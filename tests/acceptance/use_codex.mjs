// OpenAI's Codex CLI: a question, a tool of an MCP server (which Codex sends in a namespace), a schema, a second turn.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { promisify } from "node:util";
import { BASE, MODEL, PERSON, RESULT, SUM, WEATHER, run } from "./checks.mjs";

const HOME = resolve("home");
mkdirSync(HOME, { recursive: true });
writeFileSync(`${HOME}/instructions.md`, "Be brief."); // Codex's own take 5,000 tokens
// The built-in model has a context of 4,096 tokens, and calls a tool if it sees little else.
const CONFIG = `
model = "${MODEL}"
model_provider = "minisgl"
model_instructions_file = "${HOME}/instructions.md"
model_context_window = 4096
include_permissions_instructions = false
include_environment_context = false
include_apps_instructions = false
[agents]
enabled = false
[features]
goals = false
[model_providers.minisgl]
name = "minisgl"
base_url = "${BASE}"
wire_api = "responses"
stream_max_retries = 0
request_max_retries = 0
`;
const WITHOUT_SHELL = `view_image = false
shell_tool = false
unified_exec = false
`;
const MCP = `
[mcp_servers.weather]
command = "node"
args = ["${HOME}/weather.mjs"]
default_tools_approval_mode = "approve"
`;
writeFileSync(
  `${HOME}/weather.mjs`,
  `import { createInterface } from "node:readline";
const tool = { name: "get_weather", description: "Get the current weather of a city", inputSchema: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false } };
for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  const results = {
    initialize: { protocolVersion: params?.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "weather", version: "1" } },
    "tools/list": { tools: [tool] },
    "tools/call": { content: [{ type: "text", text: ${JSON.stringify(RESULT)} }] },
  };
  const answer = results[method] ? { result: results[method] } : { error: { code: -32601, message: method } };
  if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, ...answer }));
}
`,
);

// The completed items of one run, without warnings.
async function codex(config, ...args) {
  writeFileSync(`${HOME}/config.toml`, config);
  const env = { ...process.env, CODEX_HOME: HOME };
  const options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"];
  const running = promisify(execFile)("node_modules/.bin/codex", ["exec", ...options, ...args], { env, timeout: 120000 });
  running.child.stdin.end();
  const events = (await running).stdout.trim().split("\n").map((line) => JSON.parse(line));
  assert.equal(events.at(-1).type, "turn.completed");
  return events.filter((e) => e.type === "item.completed" && e.item.type !== "error").map((e) => e.item);
}

async function answers() {
  const [answer] = await codex(CONFIG, SUM);
  assert.match(answer.text, /42/);
}

async function continuesTheSession() {
  await codex(CONFIG, "My name is Anna.");
  const [answer] = await codex(CONFIG, "resume", "--last", SUM);
  assert.match(answer.text, /42/);
}

async function callsATool() {
  const config = CONFIG.replace("[features]\n", `[features]\n${WITHOUT_SHELL}`) + MCP;
  const [call, answer] = await codex(config, WEATHER);
  assert.deepEqual([call.type, call.server, call.tool], ["mcp_tool_call", "weather", "get_weather"]);
  assert.deepEqual(call.arguments, { city: "Paris" });
  assert.match(answer.text, /sunny/);
}

async function followsASchema() {
  const schema = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false };
  writeFileSync(`${HOME}/schema.json`, JSON.stringify(schema));
  const [answer] = await codex(CONFIG, "--output-schema", `${HOME}/schema.json`, PERSON);
  assert.deepEqual(Object.keys(JSON.parse(answer.text)), ["name", "age"]);
}

await run("@openai/codex", [answers, continuesTheSession, callsATool, followsASchema]);
