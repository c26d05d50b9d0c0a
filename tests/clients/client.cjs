// A gRPC client in Node that knows the server's address and nothing else.
//
// It learns every service by reflection, then lists, calls, streams, cancels and is refused, and
// prints what it saw as one JSON document.  Arguments: the address, and names of what to do.
// A bearer token is taken from the environment variable CLIENT_TOKEN.

"use strict";

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const DEADLINE_MS = 20_000;
const LOADING = { keepCase: true, longs: Number, enums: String, defaults: false, oneofs: true };
const REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
const FILES = ["generation", "log", "admin", "fleet"].map((name) => `custody/v1/${name}.proto`);

// The few messages that reflection and error details are made of.
const { nested } = protobuf.parse(`
  syntax = "proto3";
  message ReflectionRequest {
    oneof request { string file_by_filename = 3; string list_services = 7; }
  }
  message Files { repeated bytes file = 1; }
  message Service { string name = 1; }
  message Services { repeated Service service = 1; }
  message ReflectionResponse { Files files = 4; Services services = 6; }
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`, { keepCase: true }).root;

const [address, ...wanted] = process.argv.slice(2);
const channel = grpc.credentials.createInsecure();

function metadata() {
  const found = new grpc.Metadata();
  if (process.env.CLIENT_TOKEN) found.set("authorization", `Bearer ${process.env.CLIENT_TOKEN}`);
  return found;
}

function options() {
  return { deadline: Date.now() + DEADLINE_MS };
}

function reason(error) {
  const packed = error.metadata && error.metadata.get("grpc-status-details-bin")[0];
  if (!packed) return { code: grpc.status[error.code], message: error.details };
  const status = nested.Status.decode(packed);
  const names = status.details.map((detail) => detail.type_url.split(".").pop());
  const info = status.details[names.indexOf("ErrorInfo")];
  return {
    code: grpc.status[error.code],
    message: error.details,
    details: names,
    info: nested.ErrorInfo.toObject(nested.ErrorInfo.decode(info.value)),
  };
}

// Ask the server's reflection, one question after the other on one stream.
function reflect(questions) {
  const client = new grpc.Client(address, channel);
  const call = client.makeBidiStreamRequest(
    REFLECTION,
    (message) => Buffer.from(nested.ReflectionRequest.encode(message).finish()),
    (bytes) => nested.ReflectionResponse.decode(bytes),
    metadata(),
    options(),
  );
  return new Promise((resolve, reject) => {
    const answers = [];
    call.on("data", (answer) => answers.push(answer));
    call.on("error", reject);
    call.on("end", () => resolve(answers));
    questions.forEach((question) => call.write(question));
    call.end();
  }).finally(() => client.close());
}

async function discover() {
  const questions = [{ list_services: "" }, ...FILES.map((file_by_filename) => ({ file_by_filename }))];
  const [listed, ...answers] = await reflect(questions);
  const files = new Map();
  for (const answer of answers) {
    for (const file of answer.files.file) files.set(file.toString("base64"), file);
  }
  // A FileDescriptorSet is its files, each under field 1.
  const writer = protobuf.Writer.create();
  for (const file of files.values()) writer.uint32(10).bytes(file);
  const definition = loader.loadFileDescriptorSetFromBuffer(Buffer.from(writer.finish()), LOADING);
  const services = grpc.loadPackageDefinition(definition).custody.v1;
  return { services, names: listed.services.service.map((one) => one.name).sort() };
}

function unary(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, metadata(), options(), (error, answer) =>
      error ? reject(error) : resolve(answer));
  });
}

// Read a stream to its end; `stop` may end it earlier.
function read(call, stop) {
  return new Promise((resolve) => {
    const steps = [];
    call.on("data", (step) => {
      steps.push(step);
      if (stop && stop(step)) call.cancel();
    });
    call.on("error", (error) => resolve({ steps, ...reason(error) }));
    call.on("end", () => resolve({ steps, code: "OK" }));
  });
}

function body(tokens, new_tokens_max) {
  return { token_ids: { ids: Array(tokens).fill(5) }, sampling: { new_tokens_max } };
}

const ACTS = {
  list: async ({ names }) => names,
  call: async ({ generation }) => unary(generation, "Complete", { generation: body(7, 4) }),
  stream: async ({ generation }) => read(generation.Generate(body(7, 6), metadata(), options())),
  cancel: async ({ generation }) =>
    read(generation.Generate(body(7, 60), metadata(), options()), (step) => step.step === "chunk"),
  refuse: async ({ generation }) =>
    read(generation.Generate(body(5000, 4), metadata(), options())),
  deadline: async ({ generation }) =>
    read(generation.Generate(body(7, 60), metadata(), { deadline: Date.now() + 400 })),
  status: async ({ admin }) => unary(admin, "GetStatus", {}),
  drain: async ({ admin }) => unary(admin, "DrainScheduler", {}),
  logs: async ({ log }) => unary(log, "ListRequests", {}),
  join: async ({ fleet }) => {
    const call = fleet.Connect(metadata(), options());
    call.write({ items: [] });
    return read(call);
  },
};

async function main() {
  const seen = {};
  const { services, names } = await discover();
  const clients = [
    services.GenerationService, services.AdminService, services.LogService, services.FleetService,
  ].map((Service) => new Service(address, channel));
  const [generation, admin, log, fleet] = clients;
  for (const name of wanted) {
    seen[name] = await ACTS[name]({ names, generation, admin, log, fleet }).catch(reason);
  }
  clients.forEach((client) => client.close());
  return seen;
}

main().catch((error) => ({ failed: reason(error), text: String(error) })).then((seen) => {
  process.stdout.write(`${JSON.stringify(seen)}\n`);
  process.exitCode = seen.failed ? 1 : 0;
});
