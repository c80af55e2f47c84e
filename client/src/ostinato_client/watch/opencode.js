// Ostinato: tells `ostinato watch` which lines a tool call wrote. One line for each edit goes to the spool of the repository that the
// file is in, if that is watched; nothing leaves this machine here, and whatever goes wrong does not stop opencode.
import fs from "node:fs"
import path from "node:path"

const LONGEST = 1 << 20
const FULL = 64 << 20

// The file's text; "" if there is none, null if it is binary or too large.
function read(file) {
  try {
    const data = fs.readFileSync(file)
    return data.length > LONGEST || data.includes(0) ? null : data.toString("utf8")
  } catch (error) {
    return error.code === "ENOENT" ? "" : null
  }
}

function opened(directory, common) {
  const own = path.join(directory, "ostinato")
  if (!fs.existsSync(path.join(common, "ostinato")) && !fs.existsSync(own)) return null
  fs.mkdirSync(own, { recursive: true, mode: 0o700 })
  return own
}

// Where the edits of a file are kept; null if no repository that is watched has it.
function watched(file) {
  for (let place = path.dirname(file); ; place = path.dirname(place)) {
    const git = path.join(place, ".git")
    const status = fs.statSync(git, { throwIfNoEntry: false })
    if (status?.isDirectory()) return opened(git, git)
    if (status?.isFile()) {
      const told = /^gitdir: (.+?)\s*$/.exec(fs.readFileSync(git, "utf8"))
      const directory = told && path.resolve(place, told[1])
      if (!directory || !fs.existsSync(path.join(directory, "HEAD"))) return null
      const common = path.join(directory, "commondir")
      const shared = fs.existsSync(common) ? path.resolve(directory, fs.readFileSync(common, "utf8").trim()) : directory
      return opened(directory, shared)
    }
    if (place === path.dirname(place)) return null
  }
}

function real(file) {
  try {
    return fs.realpathSync(file)
  } catch {
    return path.join(fs.realpathSync(path.dirname(file)), path.basename(file))
  }
}

function append(spool, edit) {
  const flags = fs.constants.O_WRONLY | fs.constants.O_CREAT | fs.constants.O_APPEND | fs.constants.O_NOFOLLOW
  const fd = fs.openSync(path.join(spool, "spool.jsonl"), flags, 0o600)
  try {
    if (fs.fstatSync(fd).size <= FULL) fs.writeSync(fd, `\n${JSON.stringify(edit)}\n`)
  } finally {
    fs.closeSync(fd)
  }
}

const lines = (text) => text.split("\n").length - (text === "" || text.endsWith("\n") ? 1 : 0)

// The argument that holds what the call wrote, the line of the file that it begins in, and its lines; null unless that is certain.
function placed(args, before, after) {
  if (typeof args.content === "string") return args.content === after ? ["content", 0, lines(after)] : null
  const { oldString, newString } = args
  if (typeof oldString !== "string" || typeof newString !== "string" || oldString === "") return null
  const at = before.indexOf(oldString)
  if (at < 0 || before.indexOf(oldString, at + 1) >= 0) return null
  if (before.slice(0, at) + newString + before.slice(at + oldString.length) !== after) return null
  return ["newString", lines(before.slice(0, at) + "-") - 1, lines(newString)]
}

export const OstinatoWatch = async ({ directory }) => {
  const before = new Map()
  const target = (tool, args) =>
    (tool === "edit" || tool === "write") && typeof args?.filePath === "string" ? path.resolve(directory, args.filePath) : null
  return {
    "tool.execute.before": async (input, output) => {
      try {
        const file = target(input.tool, output.args)
        if (file) before.set(input.callID, { file, text: read(file), args: { ...output.args } })
        if (before.size > 100) before.delete(before.keys().next().value)
      } catch {}
    },
    "tool.execute.after": async (input) => {
      try {
        const known = before.get(input.callID)
        before.delete(input.callID)
        if (!known || known.text === null) return
        const after = read(known.file)
        const spool = after === null ? null : watched(real(known.file))
        if (!spool) return
        append(spool, {
          v: 1, agent: "opencode", call: input.callID, file: known.file, before: known.text, after, at: Date.now() / 1000,
          text: placed(known.args, known.text, after),
        })
      } catch {}
    },
  }
}
